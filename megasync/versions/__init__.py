"""Publications as such: reading and writing them, anchors, checkpoints, changed words. Knows no trainer and no engine."""
