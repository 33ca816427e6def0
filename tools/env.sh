# Sourced by the commands that run our processes. What libraries would write below the home
# directory goes below the checkout (the working directory here).
export DS_BUILD_OPS=0
export TRITON_HOME=$PWD/.cache
export TRITON_CACHE_DIR=$PWD/.cache/triton
export TORCH_EXTENSIONS_DIR=$PWD/.cache/torch-extensions
export MPLCONFIGDIR=$PWD/.cache/matplotlib
