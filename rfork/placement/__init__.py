"""Placement maps: which slice of which checkpoint tensor lies where in a rank's own tensors.

Coordinates are those of the checkpoint, so two ranks of any layout (tensor parallel, pipeline parallel, another engine)
can be compared. `recorder` derives a map from an engine's own weight loading, without bytes; `placement_map` is the
compact map; `intersection` finds the strided copies that fill one layout from others. `boxes` decides which boxes of
the checkpoint a rank needs and divides them among sources; `box_tensors` gathers and assembles them.
"""
