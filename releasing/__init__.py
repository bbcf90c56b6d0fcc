"""Tools of the repository, run by nox: releases, pairs of versions, wheels, and what is known of them."""
