"""Tests of `steppe.models`, and a backend in numpy to run programs on."""
