# The package with a GPU's libraries, as a user without rights of root.
#
#   docker build -t megatrain .
#   docker run --gpus all --ulimit memlock=-1 --shm-size 8g -v "$PWD:/work" megatrain \
#       train run.yaml
#
# The base has a compiler for torch.compile, and torch brings its own CUDA libraries.
FROM nvidia/cuda:13.0.2-devel-ubuntu24.04

RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3 python3-dev python3-venv g++ \
    && rm -rf /var/lib/apt/lists/*

ENV VIRTUAL_ENV=/opt/megatrain PATH=/opt/megatrain/bin:$PATH
COPY . /src
RUN python3 -m venv "$VIRTUAL_ENV" \
    && pip install --no-cache-dir --constraint /src/constraints.txt '/src[fp8,peft,tensorboard]' \
    && rm -rf /src

RUN useradd --create-home trainer && mkdir /work && chown trainer /work
USER trainer
WORKDIR /work
ENTRYPOINT ["megatrain"]
CMD ["doctor"]
