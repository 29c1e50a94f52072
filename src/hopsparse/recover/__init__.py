"""Training that wins back what pruning cost: a sparse student, its dense teacher, any text."""
