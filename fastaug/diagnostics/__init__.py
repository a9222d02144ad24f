"""What works on this machine: the checks behind fastaug.doctor."""
