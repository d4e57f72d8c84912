"""Scripts are no package: ``recipe_plans`` is found beside them."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "scripts"))
