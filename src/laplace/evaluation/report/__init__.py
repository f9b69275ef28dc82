"""`laplace.report`: one page that says how far a network can be trusted."""
