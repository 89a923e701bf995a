"""What a model costs on a cube, in closed form: plain arithmetic, without a process."""
