"""Flash attention: forward, backward, decoding, and the ring in one launch."""
