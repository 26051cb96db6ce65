"""`python -m turnlog`: the command line, for an environment whose scripts are not on the PATH."""

from turnlog.cli import main

if __name__ == "__main__":
    main()
