"""Kernels of training alone: merged attention, softmax, and backward passes beside their definitions."""
