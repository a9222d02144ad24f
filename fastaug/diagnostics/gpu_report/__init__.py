"""python -m fastaug.doctor --gpu-report: checks and measurements on a GPU, as HTML and JSON.

parts.py lists the parts; runner.py runs each in its own process; page.py writes the HTML.
"""
