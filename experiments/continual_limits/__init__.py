"""What limits learning one task after another: epochs, priors, how the tasks' curvature is joined; and FROMP beside."""
