"""What `ortgraph profile` and `ortgraph tune` measure, and how they decide. Nothing of it is used in serving."""
