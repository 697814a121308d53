"""``python -m fedtailor`` is the command ``fedtailor``."""

from fedtailor.cli import main

if __name__ == "__main__":
    main()
