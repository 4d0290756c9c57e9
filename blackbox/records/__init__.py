"""What is asked and what is written: values in, values out."""
