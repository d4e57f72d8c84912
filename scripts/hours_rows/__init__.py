"""Trainings of rows of every length on torch's CUDA build, and what is predicted of them."""
