"""What of this folder pytest must not import, as it would to look for doctests."""

collect_ignore = ["light_server.py"]  # a program: it sets up vLLM for its own process
