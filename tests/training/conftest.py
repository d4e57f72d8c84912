"""Its folder holds what the tests in the folders below share: ``tiny_trainers``, ``tiny_vision_trainers``."""
