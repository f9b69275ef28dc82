"""Does a Laplace approximation make a trained network worse? Tasks, networks, methods, scores, tables and a figure."""
