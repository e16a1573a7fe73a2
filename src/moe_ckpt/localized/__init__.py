"""Lets only the pipeline stages that lost ranks go back after a failure (MoEvement, section 3.4).

Ranks log the messages that they send over the boundaries of their stages: ``boundary`` sees them, and ``recording``
writes them. A rank that goes back gets from these logs the messages of its neighbours, and the results of collectives
with them, by ``exchange``.
"""
