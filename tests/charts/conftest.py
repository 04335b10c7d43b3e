"""The light test cluster, for tests that install the chart."""

from kube import control_plane as control_plane
