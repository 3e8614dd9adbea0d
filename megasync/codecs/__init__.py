"""Codecs: changed words to stored planes and back. The only place that imports a compression library or nvCOMP."""
