"""Adapters of the Images port."""
