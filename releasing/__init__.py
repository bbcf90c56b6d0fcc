"""Tools of the repository, run by nox: releases, pairs of versions, wheels, and records of test runs."""
