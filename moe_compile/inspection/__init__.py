"""`with moe_compile.inspect(folder):` shows what becomes of a model, from Dynamo's graph to the generated code."""
