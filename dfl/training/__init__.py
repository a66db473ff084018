"""Local training: task, batches, gradients, SGD, objectives, augmentation."""
