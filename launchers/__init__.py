"""Ways to start the ranks of a job."""
