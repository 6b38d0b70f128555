"""`hilgate` and `python -m hilgate`."""

from hilgate.cli.app import main

if __name__ == "__main__":
    main()
