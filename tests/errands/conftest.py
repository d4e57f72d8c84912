"""The fixture is beside its types, so that tests can name them."""

from errand_runs import make_run

__all__ = ["make_run"]
