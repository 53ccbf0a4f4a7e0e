"""Other projects' trainers with these optimizers: a module for each, which imports that project."""
