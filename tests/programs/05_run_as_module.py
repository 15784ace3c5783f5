# Stands for `python -m project.train`: the module that runs is `__main__`, and its functions import relatively.
import subprocess
import sys

if __name__ == "__main__":
    sys.exit(subprocess.run([sys.executable, "-m", "zoo"]).returncode)
