{
  description = "The TDT loss as a Hugging Face Hub kernel";

  inputs = {
    kernel-builder.url = "github:huggingface/kernels";
  };

  outputs =
    { self, kernel-builder }:
    kernel-builder.lib.genKernelFlakeOutputs {
      inherit self;
      path = ./.;

      # What the tests marked kernels_ci import beside torch, kernels and pytest.
      pythonCheckInputs =
        pkgs: with pkgs; [
          hypothesis
          numpy
        ];
    };
}
