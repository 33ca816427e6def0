"""Links between processes, and what they share on disk: journal, keys, files; decides nothing."""
