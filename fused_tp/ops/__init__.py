"""Public ops, one file each, with argument checks, custom op, fake implementation and autograd formula."""
