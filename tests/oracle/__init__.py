"""Whole models against transformers."""
