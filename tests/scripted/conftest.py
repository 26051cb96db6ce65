"""Keeps pytest from importing what only a model server can: these modules are found through its PYTHONPATH."""

collect_ignore = ["scripted_sampling.py", "scripted_server.py"]
