"""What the command does in an image first: a clean environment, places to write, a line where it cannot work.

It is inert outside an image, which says what it is by the variable FMENGINE_IMAGE. It is here and not in the
entrypoint because `apptainer exec` runs none.
"""
