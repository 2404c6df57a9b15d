"""``python -m kinetic`` is the command ``kinetic``."""

from kinetic.cli.app import main

if __name__ == "__main__":
    main()
