"""Reports of runs: traces for Perfetto, pages of HTML, and scalars for other programs."""
