"""Makes the benchmark scripts importable, as they are to one another when Python runs one."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
