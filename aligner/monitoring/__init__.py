"""What a run tells about itself: metric names and sums, phase timers, sinks, progress, the HTML report."""
