"""python -m dfl.sweep GRID: run a grid and publish its tables and figures (`dfl.sweep.command`)."""

import sys

if __name__ == "__main__":
    from dfl.core.command_line import leave_on_interrupt, spare_imports

    leave_on_interrupt()  # the imports take a while
    spare_imports()

from dfl.sweep.command import main

if __name__ == "__main__":
    sys.exit(main())
