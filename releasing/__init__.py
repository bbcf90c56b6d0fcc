"""Release one package of the workspace, and test packages beside older and newer siblings."""
