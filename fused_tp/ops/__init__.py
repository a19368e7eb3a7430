"""The public ops, one file each: checks, custom op, fake, autograd formula."""
