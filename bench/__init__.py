"""Measurements that need a source tree: scripts for machines that jprefill was not installed on."""
