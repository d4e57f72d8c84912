"""Scripts are no package: their folder is searched as it is when one of them runs."""

import pathlib
import sys

TESTS = pathlib.Path(__file__).parents[1]

sys.path.insert(0, str(TESTS.parent / "scripts"))
sys.path.append(str(TESTS / "planner"))  # synthetic_memory: a predictor without rehearsals
sys.path.append(str(TESTS / "allocator"))  # real_allocator: events played through our simulator
