# Both images: `docker build -f deploy/images.Dockerfile --target receiver .` or `--target agent`, from the root of the repository.
# `cargo images` writes the same programs as OCI layouts without a container daemon.
FROM docker.io/library/rust:1.95-bookworm AS build
WORKDIR /source
COPY . .
RUN cargo build --profile agent --locked --package tidewatch-agent
RUN cargo build --release --locked --package tidewatch-receiver --features jemalloc
RUN cargo build --release --locked --package tidewatch-cli

FROM gcr.io/distroless/cc-debian12:nonroot AS agent
COPY --from=build /source/target/agent/tidewatch-agent /tidewatch-agent
ENTRYPOINT ["/tidewatch-agent"]

FROM gcr.io/distroless/cc-debian12:nonroot AS receiver
COPY --from=build /source/target/release/tidewatch-receiver /tidewatch-receiver
# The operators' program, for `kubectl exec`.
COPY --from=build /source/target/release/tidewatch /tidewatch
ENTRYPOINT ["/tidewatch-receiver"]
