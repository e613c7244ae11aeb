"""`python -m kvmover` is the command line."""

from kvmover.cli import main

if __name__ == "__main__":
    main()
