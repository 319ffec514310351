# fatbench with its figures, for a CPU:  docker build -t fatbench . && docker run --rm -v "$PWD:/work" fatbench list suites
# For NVIDIA GPUs:  docker build --build-arg TORCH= -t fatbench . && docker run --gpus all ...
FROM python:3.13-slim
ARG TORCH="--index-url https://download.pytorch.org/whl/cpu"
COPY constraints.txt /src/
RUN grep -E '^torch(vision)?==' /src/constraints.txt > /src/torch.txt \
    && pip install --no-cache-dir $TORCH --requirement /src/torch.txt
COPY . /src
RUN pip install --no-cache-dir --constraint /src/constraints.txt /src \
    && pip install --no-cache-dir --constraint /src/constraints.txt --no-deps torchattacks && rm -r /src
ENV OMP_NUM_THREADS=1
WORKDIR /work
ENTRYPOINT ["fatbench"]
CMD ["--help"]
