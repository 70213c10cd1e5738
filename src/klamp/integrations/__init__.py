"""klamp inside other trainers. Each module here is the only one that imports its framework: ``trl`` and its parts."""
