"""The ways of packing weights that are read, each told by tensors and config; `stored` is the door to them."""
