"""Public ops, one file each: argument checks, custom op, fake, autograd formula."""
