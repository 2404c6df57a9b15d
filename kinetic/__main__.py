"""The command ``kinetic``, which is also ``python -m kinetic``."""

import sys


def main() -> None:
    """Import the command and run it; Ctrl-C during the import ends it without a traceback."""
    try:
        from kinetic.cli.app import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
